"""The SDK's questions about credentials. An engine in this process needs none."""


def get_tinker_token() -> str | None:
    """Return None: there is no token."""
    return None


def tinker_has_credentials() -> bool:
    """Return True: nothing more is needed."""
    return True


def raise_if_tinker_not_accessible() -> None:
    """Do nothing: the engine is in this process."""
