"""Every error joynexus raises on purpose.

One message argument and no ``__init__``, so that each pickles across processes and is caught by its own class
in the driver. Messages read *who: what is wrong, what was found. What to do.*
"""


class JoyNexusError(Exception):
    """Root of all errors raised on purpose."""


class SpecError(JoyNexusError, ValueError):
    """A spec is malformed or contradicts itself."""


class UnknownComponentError(SpecError):
    """A spec names a component (backbone, dataset, loss, ...) that is not registered."""


class ContractError(SpecError):
    """Policy, environment and dataset disagree on cameras, state, actions or conventions."""


class DatasetError(JoyNexusError, ValueError):
    """A dataset's files are missing, truncated or inconsistent."""


class AssetsMissingError(JoyNexusError, RuntimeError):
    """A simulator task needs assets that are not on this machine."""


class SimulatorError(JoyNexusError, RuntimeError):
    """A simulator process died, hung or raised: an infrastructure fault, never a task failure."""


class AdmissionError(JoyNexusError, RuntimeError):
    """The service cannot hold this tenant: slots, memory, quota or resources."""


class PlacementError(AdmissionError):
    """A role's bundle cannot be placed on this cluster."""


class ServiceError(JoyNexusError, RuntimeError):
    """No service is running, or a role of it failed for good."""


class TenantNotFoundError(JoyNexusError, LookupError):
    """No such tenant, slot or policy (HTTP 404)."""


class TenantExistsError(AdmissionError):
    """A live tenant already has this name (HTTP 409)."""


class SequenceConflictError(JoyNexusError, ValueError):
    """A sequence number was used again with another payload, or out of order (HTTP 409)."""


class InvalidBatchError(JoyNexusError, ValueError):
    """A tenant's batch does not have the shapes or keys that its policy needs (HTTP 400)."""


class NonFiniteError(JoyNexusError, ArithmeticError):
    """A tenant's data, loss or gradient holds NaN or infinity; its parameters were left as they were."""


class TenantFailedError(JoyNexusError, RuntimeError):
    """A tenant's own code or data failed; no other tenant was touched."""


class StalePolicyError(JoyNexusError, RuntimeError):
    """A sample or request refers to a policy version that is too old or not resident."""


class BackPressureError(JoyNexusError, RuntimeError):
    """A bounded queue is full; try again later (HTTP 429)."""


class QueueClosedError(JoyNexusError, RuntimeError):
    """The queue, or the tenant's lane in it, is closed."""


class RequestCancelledError(JoyNexusError, RuntimeError):
    """The caller gave up before the request was run."""


class CheckpointError(JoyNexusError, RuntimeError):
    """A checkpoint is missing, damaged or does not fit the policy."""
