"""Everything that the coordinator writes.

- `state_saver`: the job's state in the store, and what happens when the store is away. Start there.
- `run_records`: events.jsonl, progress.jsonl, summary.json and exit.json of a run;
  `run_summary`: the summary, computed from the events.
- `run_directory`: other small files of the run directory, and the first state of a run.
- `checkpoint_commit`: completes durable checkpoints.

Decisions wait for the store only. A failing disk costs records, never a decision.
"""
