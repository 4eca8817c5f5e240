"""Interpreted kernels run the source that was imported."""

import importlib

import pytest
import torch

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def unused_kernel(out):
    tl.store(out, 7)


@triton.jit
def fill_kernel(out, VALUE: tl.constexpr):
    tl.store(out, VALUE)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs compiled kernels")
def test_a_file_that_changes_after_its_import_changes_no_kernel(tmp_path, monkeypatch):
    path = tmp_path / "kernel_whose_file_changes.py"
    path.write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(path.stem)
    path.write_text("\n\n\n" + KERNEL)
    out = torch.zeros(1)
    module.fill_kernel[(1,)](out, VALUE=3)
    assert out.tolist() == [3]
