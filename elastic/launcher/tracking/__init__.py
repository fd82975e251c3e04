"""What a run does, told to TensorBoard, Weights & Biases, MLflow or a user's own callback.

A tracker is a process of its own that reads the run's record, events.jsonl. So each finished step
comes once and in no process that trains, whatever nodes are lost, and a tracker may be started
later, or again. `docs/decisions/048-trackers-read-the-record.md` has the reasons.

- `callback`: what a tracker is told, and the class that users derive from;
- `record`: from the lines of the record to these calls;
- `targets`: from the text of a flag to a callback;
- `tensorboard`, `wandb`, `mlflow`: callbacks that write to these libraries;
- `follower`: reads a growing record and calls a callback, with retries.
"""
