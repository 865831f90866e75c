"""What users give: cluster, model, network, prices, profiles, names."""
