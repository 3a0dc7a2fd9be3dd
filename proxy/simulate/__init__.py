"""`tierline simulate`: policies side by side, in virtual time, on drawn or recorded traffic."""
