"""Run a planned training step in the user's own process.

`train_step` is the object that a training loop calls; `planned_loss` leaves the update to the loop. Both look up or capture the step for a
batch (`step_selector`, `step_cache`, `recapture`) and prepare it (`prepared_step`). `shapes/` pads batches to a few sizes.
`TrainStep` updates once per accumulation cycle (`update_cycle`), and `loop_plan` transfers a plan for another loop.
An `executor` runs the schedule as Python source from `codegen`. Its engine in `offload/` moves values to a store
(`stores/`), and its arena places tensors in one block of memory (`arena/`). `op_profiler` measures costs, and
`verification/` compares steps with eager.

In: a model, a loss function, an optimizer, and a plan; inside, a `Program` and a `Plan`.
Out: the step's results, with the bits of the captured step, and measured costs of ops and stores.
Read first: `train_step`.
"""
