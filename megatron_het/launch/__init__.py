"""Steps between the command line and Megatron's training: flags, checks, application of a plan."""
