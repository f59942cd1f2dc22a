"""One API key attacks, another one's texts are measured: every route and RPC of a gateway times every resource.

`table` has a row for each route and RPC, `attacks` what the rows name. `test_table` compares the table with the routes
and services as the gateway has them, `test_counts` runs attacks in short and counts, and `test_neighbour`, which is
`make isolation`, measures a neighbour on real processes.
"""
