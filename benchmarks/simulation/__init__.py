"""A simulation: the product's own queues and fair shares on a virtual clock, with devices that only take time.

What runs is the product: :class:`~joynexus.queues.training_queue.TrainingQueue`, with its lanes, leases and fair
rounds, :class:`~joynexus.queues.inference_queue.GroupBatcher`, :class:`~joynexus.scheduling.fairness.FairShare` and
:func:`~joynexus.scheduling.admission.admit`. What is imitated is what needs a device, a simulator or a network:
``device.py`` takes seconds from a cost model in place of computing, ``tenants.py`` sleeps in place of stepping robots,
and ``trainer.py`` and ``learners.py`` follow the loops of the TrainingActor and its learners.

Left out: faults, checkpoints, publications and their bytes, the network, the control plane's own time, data loading,
differences between a tenant's samples, and how well anything learns.
"""
