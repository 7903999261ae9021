"""How a process is attached to the daemon: its stream, its lock, and the memory it maps."""

from kvstore.attach.attachment import Attachment
from kvstore.attach.calls import new_id
from kvstore.attach.held import Held
from kvstore.attach.lease import Grant, Lease
from kvstore.attach.mapped import MappedSlab
from kvstore.attach.times import OperationTimes

__all__ = ["Attachment", "Grant", "Held", "Lease", "MappedSlab", "OperationTimes", "new_id"]
