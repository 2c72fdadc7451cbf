import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import libraries  # noqa: E402


def pytest_generate_tests(metafunc):
    if "library" in metafunc.fixturenames:
        kinds = getattr(metafunc.function, "libraries", libraries.ALL)
        metafunc.parametrize("library", kinds, ids=lambda kind: kind.name, indirect=True)


@pytest.fixture
def library(request):
    return request.param()


@pytest.fixture
def normal():
    """Random arrays of a shape: float32 unless told."""
    generator = np.random.default_rng(0)

    def make(*shape, dtype="float32"):
        kind = libraries.bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
        return generator.standard_normal(shape).astype(kind)

    return make
