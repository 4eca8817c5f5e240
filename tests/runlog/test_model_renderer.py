"""Renderers by model name: one per process, found where the engine finds the model, or learned from
a service.
"""

import pytest

from planish import ServiceClient
from planish.errors import UnknownModelError
from planish.runlog.model_renderer import learn_renderer, model_renderer
from planish.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def test_a_name_gives_one_renderer(model):
    renderer = model_renderer(model)
    assert renderer is model_renderer(model)
    assert renderer.name == "qwen3_instruct"
    named = model_renderer(model, "role_colon")
    assert named.name == "role_colon"
    assert named is model_renderer(model, "role_colon")


def test_a_name_that_only_the_service_knows_is_learned_from_it(model, tmp_path):
    with pytest.raises(UnknownModelError, match="mine"):
        model_renderer("mine")
    with ServiceClient(models={"mine": model}, data_dir=tmp_path) as client:
        learned = learn_renderer(client, "mine")
        assert learn_renderer(client, "mine", "chatml").name == "chatml"
    assert learned is model_renderer("mine")
    assert learned.name == "qwen3_instruct"
