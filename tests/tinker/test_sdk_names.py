"""planish.tinker has every public name of the installed SDK, either implemented or rejected with a
reason.
"""

import importlib
import inspect
import pkgutil

import pytest
import tinker
import tinker.lib.public_interfaces
import tinker.types

import planish
import planish.tinker
from planish.errors import UnsupportedError
from planish.tinker.refused import Refused
from planish.tinker.types import REFUSED

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
# Constructors of the SDK's own use, which need a connection.
OWN_USE = {"create", "from_sampler_handle"}


def public_names(module) -> list[str]:
    names = getattr(module, "__all__", None)
    return list(names) if names else [n for n in vars(module) if n[0].isupper()]


def submodules(package) -> list[str]:
    return [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]


def test_the_package_has_all_names_of_the_sdk():
    missing = {name for name in tinker.__all__ if not hasattr(planish.tinker, name)}
    assert missing == set()
    assert {name for name in tinker.__all__ if name not in planish.tinker.__all__} == set()


@pytest.mark.parametrize("package", ["tinker.types", "tinker.lib.public_interfaces"])
def test_submodules_have_the_names_of_the_sdks(package):
    theirs = importlib.import_module(package)
    ours = importlib.import_module(f"planish.{package}")
    assert {name for name in public_names(theirs) if not hasattr(ours, name)} == set()
    modules = submodules(theirs)
    assert len(modules) > 8
    for name in modules:
        if name.startswith("backcompat_client") or name == "rest_client_common":
            continue  # base classes of the SDK's own
        mine = importlib.import_module(f"planish.{package}.{name}")
        module = importlib.import_module(f"{package}.{name}")
        declared = getattr(module, "__all__", [])
        assert {n for n in declared if not hasattr(mine, n)} == set(), name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_unsupported_type_explains_itself(name):
    kind = getattr(planish.tinker.types, name)
    with pytest.raises(UnsupportedError, match=f"{name} is not offered: .{{10,}}"):
        kind(anything=1)
    assert not isinstance(planish.ModelInput.empty(), kind)


def test_what_is_not_refused_is_a_type_of_planish():
    for name in planish.tinker.types.__all__:
        value = getattr(planish.tinker.types, name)
        refused = inspect.isclass(value) and issubclass(value, Refused)
        assert refused == (name in REFUSED), name


@pytest.mark.parametrize("kind", CLIENTS)
def test_each_method_of_the_sdks_clients_is_served_or_refused_with_a_reason(kind):
    ours = getattr(planish.tinker, kind)
    for name in dir(getattr(tinker, kind)):
        if name.startswith("_") or name in OWN_USE or hasattr(ours, name):
            continue
        client = ours.__new__(ours)
        assert not hasattr(client, name)
        with pytest.raises(UnsupportedError, match=rf"{kind}\.{name} is not offered: .{{10,}}"):
            getattr(client, name)


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_unsupported_name_exists_in_the_sdk(kind):
    refused = getattr(planish.tinker, kind).refused_methods
    assert {name for name in refused if not hasattr(getattr(tinker, kind), name)} <= {
        "holder",
        # Methods of another client: the error says of which.
        *("sample", "compute_logprobs", "forward_backward", "optim_step", "save_state"),
    }


def test_an_unknown_attribute_is_an_ordinary_error():
    client = planish.SamplingClient.__new__(planish.SamplingClient)
    with pytest.raises(AttributeError, match="'SamplingClient' object has no attribute 'smaple'"):
        client.smaple  # noqa: B018


def test_errors_of_planish_are_caught_by_the_sdks_names():
    for name in ("TinkerError", "APIError", "APIStatusError", "BadRequestError"):
        with pytest.raises(getattr(planish.tinker, name)):
            planish.SamplingParams(temperature=-1)
    for name in tinker.__all__:
        theirs = getattr(tinker, name)
        if inspect.isclass(theirs) and issubclass(theirs, Exception):
            ours = getattr(planish.tinker, name)
            if not issubclass(theirs, Warning):
                assert issubclass(ours, planish.tinker.TinkerError)


def test_provenance_is_checked_and_kept():
    types = planish.tinker.types
    datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    spans = [
        types.PromptProvenanceSpan(sequence_id="s", length=1),
        types.SampledProvenanceSpan(sequence_id="s", length=2),
    ]
    told = datum.with_provenance(model_input=spans, loss_fn_inputs=spans)
    assert told.model_input_spans == spans
    assert told.loss_fn_inputs == datum.loss_fn_inputs
    with pytest.raises(ValueError, match="model_input_spans covers 2 of 3 positions"):
        datum.with_provenance(model_input=spans[1:], loss_fn_inputs=spans)
    with pytest.raises(ValueError, match="give both or neither"):
        types.Datum(datum.model_input, datum.loss_fn_inputs, spans)
    with pytest.raises(ValueError, match="sequence_id=''"):
        types.PromptProvenanceSpan(sequence_id="", length=1)
