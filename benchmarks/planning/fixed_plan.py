"""Coordinator that takes its plan from RUN_DIR/plan.txt, for benchmarks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from elastic.domain.types import Plan
from elastic.planning.plan.plan import parse_plan
from elastic.planning.search import search
from elastic.planning.search.assemble import assign_backups
from elastic.planning.search.search import PlanRequest

FILE = "plan.txt"


def main() -> int:
    given = parse_plan((Path(sys.argv[sys.argv.index("--run-dir") + 1]) / FILE).read_text())

    def fixed(request: PlanRequest) -> Plan:
        plan, why = assign_backups(
            replace(given, epoch=request.epoch),
            request.nodes,
            request.backup,
            request.backup_weighing(),
        )
        return replace(plan, reason=f"given; {why}")

    search.make_plan = fixed  # before other modules import it
    from elastic.coordinator import service

    return service.main()


if __name__ == "__main__":
    sys.exit(main())
