"""Constructs that `fullgraph=True` refuses, and the code of the reason."""

KNOWN_BREAKS = {
    "control_flow.if_on_tensor": "data-dependent-branch",
    "control_flow.while_on_tensor": "data-dependent-branch",
    "generators.async_function": "unsupported-opcode",
    "functools_module.singledispatchmethod": "unsupported-value",  # where it has a weak cache
    "random_time.random_in_condition": "data-dependent-branch",
    "introspection.import_submodule": "unknown-call",
    "torch_features.item_and_tolist": "data-dependent-value",
    "torch_features.nonzero_and_mask": "dynamic-output-shape",
    "torch_features.backward_inside": "unsupported-method",
    "numbers_from_data.branch_on_item": "data-dependent-branch",
    "numbers_from_data.range_of_item": "data-dependent-value",
    "messages.catch_warnings_default": "unknown-call",
    "messages.catch_warnings_with_operations": "unknown-call",
    "messages.catch_warnings_over_break": "data-dependent-value",
    "weak_references.weakref_proxy": "unknown-call",
    "weak_references.weak_method": "unknown-call",
    "weak_references.weak_dead": "unsupported-value",
    "weak_references.weak_dead_in_dictionary": "unsupported-value",
    "weak_references.weak_in_helper": "unsupported-value",
    "weak_references.weak_of_cleared_container": "unsupported-value",
    "weak_references.weak_of_popped_item": "unsupported-value",
    "weak_references.weak_of_rebound_cell": "unsupported-value",
    "checks.check_fails_in_try": "data-dependent-branch",  # failing may be usual there
    "library_objects.decimal_context": "unknown-call",
    "library_objects.datetime_now_difference": "data-dependent-value",
}
