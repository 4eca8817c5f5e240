"""The names that programs may import from `planish`. Adding one is a decision; losing one breaks
programs.
"""

import planish

NAMES = [
    "APIFuture",
    "AdamParams",
    "Checkpoint",
    "CheckpointError",
    "Constraint",
    "DamagedFileError",
    "Datum",
    "EncodedTextChunk",
    "EngineClosedError",
    "ForwardBackwardOutput",
    "LoraConfig",
    "ModelInput",
    "NonFiniteError",
    "OptimStepResponse",
    "PlanishError",
    "RestClient",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StorageError",
    "TensorData",
    "TrainingClient",
    "UnknownModelError",
    "UnsupportedError",
    "UserError",
    "errors",
    "types",
]

METHODS = {
    "ServiceClient": {
        "get_tokenizer",
        "create_lora_training_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
        "create_sampling_client",
        "get_server_capabilities",
        "close",
    },
    "TrainingClient": {
        "forward",
        "forward_backward",
        "forward_backward_custom",
        "optim_step",
        "save_state",
        "load_state",
        "load_state_with_optimizer",
        "save_weights_for_sampler",
        "save_weights_and_get_sampling_client",
        "create_sampling_client",
        "get_info",
        "get_tokenizer",
    },
    "SamplingClient": {"sample", "compute_logprobs", "get_base_model", "get_tokenizer"},
    "RestClient": {
        "get_server_capabilities",
        "list_checkpoints",
        "list_user_checkpoints",
        "get_training_run",
        "get_training_run_by_tinker_path",
        "list_training_runs",
        "get_weights_info_by_tinker_path",
        "delete_checkpoint",
        "delete_checkpoint_from_tinker_path",
    },
}
ONLY_DIRECT = {
    "ServiceClient": {"create_rest_client", "get_telemetry", "refused_methods"},
    "TrainingClient": {"get_telemetry", "model_id", "refused_methods", "result"},
    "SamplingClient": {"get_telemetry", "refused_methods", "result"},
    "RestClient": {"get_telemetry", "refused_methods"},
}


def test_public_names():
    assert sorted(planish.__all__) == NAMES
    assert all(hasattr(planish, name) for name in NAMES)


def test_every_method_has_its_async_form():
    for name, methods in METHODS.items():
        public = {
            attribute for attribute in vars(getattr(planish, name)) if not attribute.startswith("_")
        }
        assert public == methods | {f"{method}_async" for method in methods} | ONLY_DIRECT[name]
        for method in methods:
            assert getattr(getattr(planish, name), f"{method}_async").__name__ == f"{method}_async"
