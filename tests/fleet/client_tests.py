"""The tests of clients that every service must pass, for `from client_tests import *`."""

from test_training_client import (
    test_a_custom_loss_equals_the_built_in_one,
    test_a_custom_loss_that_calls_its_own_client_is_rejected,
    test_a_custom_loss_that_raises_fails_the_next_step,
    test_a_loaded_state_continues_training_exactly,
    test_a_slow_custom_loss_blocks_only_its_own_client,
    test_a_stop_string_can_be_a_control_token,
    test_all_forms_of_prompt_logprobs,
    test_an_invalid_loss_is_rejected,
    test_an_unknown_run_differs_from_a_run_without_checkpoints,
    test_async_forms_of_checkpoints,
    test_clients_cannot_be_copied_or_pickled,
    test_errors_have_the_same_class_locally_and_on_a_server,
    test_requests_of_unreferenced_clients_are_answered,
    test_sampled_and_trained_logprobs_agree,
    test_the_tutorials_loop_raises_the_reward_and_async_equals_blocking,
)

__all__ = [
    "test_a_custom_loss_equals_the_built_in_one",
    "test_a_custom_loss_that_calls_its_own_client_is_rejected",
    "test_a_custom_loss_that_raises_fails_the_next_step",
    "test_a_loaded_state_continues_training_exactly",
    "test_a_slow_custom_loss_blocks_only_its_own_client",
    "test_a_stop_string_can_be_a_control_token",
    "test_all_forms_of_prompt_logprobs",
    "test_an_invalid_loss_is_rejected",
    "test_an_unknown_run_differs_from_a_run_without_checkpoints",
    "test_async_forms_of_checkpoints",
    "test_clients_cannot_be_copied_or_pickled",
    "test_errors_have_the_same_class_locally_and_on_a_server",
    "test_requests_of_unreferenced_clients_are_answered",
    "test_sampled_and_trained_logprobs_agree",
    "test_the_tutorials_loop_raises_the_reward_and_async_equals_blocking",
]
