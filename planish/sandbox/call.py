"""Runs in the sandbox as main.py: calls a function of solution.py with the arguments of call.json,
prints what it returned.

What the solution prints goes to standard error, so standard output holds one JSON value:
{"returned": plain(result)}. A solution may write there as well, and then says what its function
would return; the answer that is expected is not here to be found.
"""

import ast
import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """A value as JSON can hold it; tuples are lists, sets and mappings come in one order. TypeError
    for other objects.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted((plain(part) for part in value), key=json.dumps)}
    if isinstance(value, Mapping):
        pairs = [[plain(key), plain(part)] for key, part in value.items()]
        return {"mapping": sorted(pairs, key=lambda pair: json.dumps(pair[0]))}
    raise TypeError(f"the function returned a {type(value).__name__}, which no test can compare")


def find(solution: Any, name: str) -> Any:
    """A function of the module, or a method of its class Solution."""
    if not hasattr(solution, name) and hasattr(solution, "Solution"):
        return getattr(solution.Solution(), name)
    return getattr(solution, name)


def main() -> None:
    with open("/program/call.json", encoding="utf-8") as file:
        call = json.load(file)
    arguments = ast.literal_eval(call["arguments"])
    answer = os.dup(1)
    os.dup2(2, 1)
    import solution  # type: ignore[import-not-found]  # the program under test, beside this file

    returned = find(solution, call["function"])(*arguments)
    sys.stdout.flush()
    with open(answer, "w", encoding="utf-8") as file:
        json.dump({"returned": plain(returned)}, file)


if __name__ == "__main__":
    main()
