"""Several processes that answer clients, with the engines of one server behind them."""
