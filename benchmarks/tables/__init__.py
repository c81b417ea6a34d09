"""Tables and the plot, made from benchmarks/results and put into documents."""
