"""What happens on a rank: session, executor, transfers, gradients, data, report."""
