"""What has the cookbook's names and another form in planish. planish/cookbook/table.py says which."""
