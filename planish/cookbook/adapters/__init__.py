"""Adapters for the cookbook's names whose objects have another form in planish. The table of
names is planish/cookbook/table.py.
"""
