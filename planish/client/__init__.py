"""What a user holds: clients that turn method calls into operations of a `Service`, and the futures
that come back.
"""
