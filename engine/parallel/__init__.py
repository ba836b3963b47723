"""How a model is split over ranks, as data applied after it is built."""
