"""The synchronous client, and its spaces."""

from kvstore.client.client import Client, client_name
from kvstore.client.space import Space, Ticket, with_parent

__all__ = ["Client", "Space", "Ticket", "client_name", "with_parent"]
