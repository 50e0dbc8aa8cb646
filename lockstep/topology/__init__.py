"""Where a job runs: parallel layouts with their rules, memory per rank, catalogues of models and hardware. No torch."""
