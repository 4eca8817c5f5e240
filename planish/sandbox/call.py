"""The driver of a FunctionTest. It runs in the sandbox as main.py, calls a function of solution.py
with the arguments in call.json, and prints the result.

The solution's prints are redirected to standard error, so standard output holds one JSON value:
{"returned": to_json_value(result)}. A hostile solution can still write to standard output, but it
gains nothing: it only chooses another answer, and the expected answer is not in the sandbox.
"""

import ast
import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def to_json_value(value: Any) -> Any:
    """Return `value` in a form that `json.dumps` can write. Tuples become lists. Sets and mappings
    become sorted lists inside {"set": ...} and {"mapping": ...}. Raises TypeError for other
    objects.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted((to_json_value(item) for item in value), key=json.dumps)}
    if isinstance(value, Mapping):
        pairs = [[to_json_value(key), to_json_value(item)] for key, item in value.items()]
        return {"mapping": sorted(pairs, key=lambda pair: json.dumps(pair[0]))}
    raise TypeError(f"the function returned a {type(value).__name__}, which no test can compare")


def find_function(solution: Any, name: str) -> Any:
    """Return the function `name` of the module, or the method `name` of its class Solution."""
    if not hasattr(solution, name) and hasattr(solution, "Solution"):
        return getattr(solution.Solution(), name)
    return getattr(solution, name)


def main() -> None:
    """Call the function and print the result as JSON. Errors of the solution are not caught."""
    with open("/program/call.json", encoding="utf-8") as file:
        call = json.load(file)
    arguments = ast.literal_eval(call["arguments"])
    real_stdout = os.dup(1)
    os.dup2(2, 1)
    import solution  # type: ignore[import-not-found]  # the program under test, beside this file

    result = find_function(solution, call["function"])(*arguments)
    sys.stdout.flush()
    with open(real_stdout, "w", encoding="utf-8") as file:
        json.dump({"returned": to_json_value(result)}, file)


if __name__ == "__main__":
    main()
