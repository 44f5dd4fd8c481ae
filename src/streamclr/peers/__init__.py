"""Methods of other papers for learning from a stream, to compare with: each a policy, a loss or an optimizer. A file
may import the buffer, the losses and what is below them."""
