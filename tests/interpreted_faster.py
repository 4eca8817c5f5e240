"""Triton's interpreter puts its own functions in the place of the language's again whenever a
kernel calls a function: a quarter of its time.

Once for each module and launch is enough: they stay until the launch is over. Other threads wait
until then, because a launch that ends restores the language's functions for all of them.

The interpreter also reads the source of a kernel at its first launch. If the file had changed since
its import, the lines of another function would be run. So the source is read at the import.
"""

import threading
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def install() -> None:
    put, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()
    one_launch = threading.RLock()

    def put_once(function: Callable[..., Any]) -> Any:
        module = id(function.__globals__)
        if module not in done:
            done.add(module)
            return put(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        with one_launch:
            done.clear()
            launch(self, *args, **kwargs)

    create = interpreter.InterpretedFunction.__init__

    def create_with_source(self: Any, fn: Callable[..., Any], **options: Any) -> None:
        create(self, fn, **options)
        self.rewrite()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = put_once, launch_anew
    interpreter.InterpretedFunction.__init__ = create_with_source
