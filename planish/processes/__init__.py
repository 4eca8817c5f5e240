"""Work in other processes: Ctrl-C, and programs that answer questions and can be killed."""
