"""Methods of other papers for learning from a stream, each a policy, a loss or an optimizer that a run can name. May
import what the losses and the optimizers are made of."""
