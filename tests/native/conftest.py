import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton's kernels run: a GPU if there is one, else the CPU, interpreted (tests/conftest.py)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
