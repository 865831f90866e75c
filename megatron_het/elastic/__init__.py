"""Training that survives changes of the pool: plans change in running processes, state moves by parameter ranges."""
