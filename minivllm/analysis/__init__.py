"""Analysis: what records say, as cells, statistics, designs and comparisons; free of torch."""
