"""The clients that users call. Their methods submit operations to a `Service` and return
futures.
"""
