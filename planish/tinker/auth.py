"""The SDK's functions for credentials. An engine in this process needs no credentials."""


def get_tinker_token() -> str | None:
    """Return None, because no token is needed."""
    return None


def tinker_has_credentials() -> bool:
    """Return True, because no credentials are needed."""
    return True


def raise_if_tinker_not_accessible() -> None:
    """Do nothing, because an engine in this process is always accessible."""
