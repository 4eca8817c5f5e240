"""What `planish doctor` finds out: facts about this machine, each with a remedy where one is
needed. The modules here ask the parts of planish that know; they hold no rules of their own.
"""
