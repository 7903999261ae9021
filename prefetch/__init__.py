"""Moving blocks up before they are asked for."""
