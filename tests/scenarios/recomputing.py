"""`elastic run` whose planner lets every stage recompute: `python -m tests.scenarios.recomputing run FLAGS...`.

Without `run` it is the coordinator that this `elastic run` starts.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from elastic.core.types import Plan
from elastic.planning import search
from elastic.planning.search import PlanRequest


def _recomputing(plan: Plan) -> Plan:
    pipelines = tuple(
        replace(pipeline, stages=tuple(replace(stage, recompute=True) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def coordinate() -> int:
    real = search.make_plan

    def make_plan(request: PlanRequest) -> Plan:
        return _recomputing(real(request))

    search.make_plan = make_plan  # before anybody takes it from there
    from elastic.coordinator import service

    return service.main()


def run(flags: list[str]) -> int:
    from elastic.launcher.flags import run_parser
    from elastic.launcher.local import launch
    from elastic.launcher.options import request

    wanted = request(run_parser({}).parse_args(flags), {})
    return launch(replace(wanted, services=("tests.scenarios.recomputing", wanted.services[1])))


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:]) if sys.argv[1:2] == ["run"] else coordinate())
