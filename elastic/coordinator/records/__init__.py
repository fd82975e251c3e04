"""All records that the coordinator writes.

- `state_saver`: the job's state in the store, also while the store is away. Start reading there.
- `run_records`: events.jsonl, progress.jsonl, waiting.json, summary.json and exit.json;
  `run_summary`: the summary, computed from the events.
- `run_directory`: other small files of the run directory, and the first state of a run.
- `checkpoint_commit`: completes durable checkpoints.

Decisions wait only for the store. If a disk fails, records are lost, but no decision.
"""
