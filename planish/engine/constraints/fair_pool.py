"""Worker threads that several owners share fairly."""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from planish.processes.background import BackgroundThread


class FairPool:
    """A fixed number of threads that run the jobs of owners, such as a server's tenants.

    Owners take turns. The jobs of an owner begin in the order of their submission, and at most
    `max_per_owner` of them run at once. So an owner with slow jobs leaves threads to the others.
    The threads start when they are needed. All methods are thread-safe.
    """

    def __init__(
        self, name: str, num_threads: int, max_per_owner: int, stop: Callable[[], object]
    ) -> None:
        """`stop` is called at the program's exit. It must make running jobs end soon."""
        self._name = name
        self._num_threads = num_threads
        self._max_per_owner = max_per_owner
        self._stop = stop
        self._condition = threading.Condition()
        self._queues: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        """The waiting jobs of each owner. The first owner is the next to take its turn."""
        self._running: Counter[str] = Counter()
        self._threads: list[BackgroundThread] = []
        self._num_idle = 0
        self._is_closed = False

    def submit(self, owner: str, job: Callable[[], None]) -> None:
        """Queue a job. It must not raise."""
        with self._condition:
            self._queues.setdefault(owner, deque()).append(job)
            num_waiting = sum(map(len, self._queues.values()))
            if num_waiting > self._num_idle and len(self._threads) < self._num_threads:
                self._threads.append(BackgroundThread(self._run, self._name, stop=self._exit))
            self._condition.notify()

    def withdraw(self, owner: str, job: Callable[[], None]) -> bool:
        """Remove a job that has not begun. Return whether it was removed."""
        with self._condition:
            queue = self._queues.get(owner)
            if queue is None or job not in queue:
                return False
            queue.remove(job)
            return True

    def close(self) -> None:
        """Let the threads end. Jobs that have not begun are dropped."""
        with self._condition:
            self._is_closed = True
            self._queues.clear()
            self._condition.notify_all()

    def _exit(self) -> None:
        self.close()
        self._stop()

    def _run(self) -> None:
        while True:
            with self._condition:
                while (next_job := self._take()) is None:
                    if self._is_closed:
                        return
                    self._num_idle += 1
                    self._condition.wait()
                    self._num_idle -= 1
            owner, job = next_job
            job()
            del next_job, job  # an idle thread must not keep what its last job used
            with self._condition:
                self._running[owner] -= 1
                if not self._running[owner]:
                    del self._running[owner]
                # The owner may have reached its maximum, and another thread may be idle.
                self._condition.notify()

    def _take(self) -> tuple[str, Callable[[], None]] | None:
        for owner in [*self._queues]:
            if self._running[owner] < self._max_per_owner:
                queue = self._queues[owner]
                job = queue.popleft() if queue else None
                if queue:
                    self._queues.move_to_end(owner)
                else:
                    del self._queues[owner]
                if job is not None:
                    self._running[owner] += 1
                    return owner, job
        return None
