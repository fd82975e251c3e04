"""This runtime beside torchrun and torchft: the same work, and kills at the same moments.

- `__main__`: runs all systems one after the other, and reports; start reading here.
- `systems`: how each system is started, with its defaults and tuned as its documents advise.
- `cluster`: local nodes as process trees, which are killed and replaced.
- `figures`: the figures of a run, from the records of its workers.
- `job`: the model, the data and the records, which all training scripts share.
- `train_ours`, `train_torchrun`, `train_torchft`: the training scripts.
- `lighthouse`: a service of torchft.
"""
