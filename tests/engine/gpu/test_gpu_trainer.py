"""The trainer's tests on a GPU: gradients as transformers' and PEFT's on the CPU, packed as one by
one, and what is not finite.
"""

import pytest
import test_trainer
import torch
from backends import load_on

# Collected here once more, with the fixtures below.
from test_trainer import (  # noqa: F401
    test_a_long_sequence_runs_alone_with_recomputed_activations,
    test_a_non_finite_loss_fails_the_call_and_the_next_step,
    test_an_abandoned_call_leaves_no_gradient,
    test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16,
    test_cross_entropy_is_linear_in_its_weights,
    test_each_loss_equals_transformers_and_peft,
    test_gradients_accumulate_over_calls_until_the_step,
    test_gradients_equal_transformers_and_peft,
    test_gradients_of_partially_trained_adapters_equal_peft,
    test_non_finite_weights_raise,
    test_packed_training_equals_single_datums_and_any_split,
    test_several_targets_per_position_equal_peft,
    test_temperature_scales_the_logits_of_the_loss,
)

from planish.model.decoder.decoder import Decoder

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _there(device):
    """What those tests put on the CPU is on the device; what they compare is compared on the
    CPU.
    """
    relative = test_trainer.relative
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_trainer, "CPU", device)
        patch.setattr(test_trainer, "relative", lambda a, b: relative(a.cpu(), b.cpu()))
        yield


@pytest.fixture(scope="module")
def model_path(model_of):
    return model_of("llama", tied=False)


@pytest.fixture(scope="module")
def decoder(model_path, device) -> Decoder:
    return load_on(model_path, torch.float32, device)
