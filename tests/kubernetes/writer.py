"""Saves states in the job's store as a leading coordinator does, until it is killed.

Prints a line per state: the endpoint that took it, the seconds that the decision was held, and the
attempts that failed. Uses the environment of a coordinator's pod.
"""

from __future__ import annotations

import itertools
import json
import os
import time

from elastic.coordinator.records.state_saver import StateSaver
from elastic.core.job.state import JobState, Policy
from elastic.core.protocol.store_spec import StoreSpec
from elastic.store.etcd import EtcdStore
from elastic.store.interface import Lease, StoreUnavailable

PAUSE_S = 0.05
"""Time between two decisions."""


def main() -> None:
    fields = {"url": "", "ca": "_CA", "cert": "_CERT", "key": "_KEY"}
    spec = StoreSpec(**{name: os.environ[f"PET_STORE{end}"] for name, end in fields.items()})
    store = EtcdStore(spec, "elastic/writer")
    saver = StateSaver(store, _lease(store), "job/state", None)
    for epoch in itertools.count(1):
        began, failures, done = time.monotonic(), 0, list[float]()
        saver.hold(None, lambda done=done: done.append(time.monotonic()))  # type: ignore[misc]
        saver.save(JobState(policy=Policy(min_nodes=2, max_nodes=4), epoch=epoch))
        while not done:
            time.sleep(PAUSE_S / 5)
            if saver.due():
                failures += 1
                saver.retry()
        endpoint = store._connection.endpoint
        line = {"endpoint": endpoint, "held_s": done[0] - began, "failures": failures}
        print(json.dumps(line), flush=True)
        time.sleep(PAUSE_S)


def _lease(store: EtcdStore) -> Lease:
    while True:
        try:
            return store.acquire("writer", 60.0, time.time())
        except StoreUnavailable:  # members that elect a leader
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
