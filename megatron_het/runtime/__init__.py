"""Parts of a rank's process: session, executor, transfers, gradients, data, report."""
