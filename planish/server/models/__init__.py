"""Training models on the server: the order of their requests, their execution and their replay."""
