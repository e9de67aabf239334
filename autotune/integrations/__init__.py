"""Plans inside the training loops of other libraries, one module per library.

Each module needs its library; this folder imports without any of them.

In: the library's own trainer, module or model, and a plan.

Out: the same loop, whose losses and gradients are computed under the plan.

Read first: `lightning`.
"""
