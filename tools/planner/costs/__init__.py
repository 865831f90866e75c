"""What a candidate costs: time, memory, traffic and money of layers, stages and plans."""
