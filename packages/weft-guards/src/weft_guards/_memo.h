/* What a run that passed leaves for the next one: a list of steps that compare roots and versions of
 * dicts, and test only what those say nothing about (docs/architecture/guards-checks.md says why).
 *
 * A memo holds no references: no object is touched before something alive was found to point to it.
 * A step that finds another object makes the memo STALE: the whole program runs, and remembers again.
 */
#ifndef WEFT_GUARDS_MEMO_H
#define WEFT_GUARDS_MEMO_H

#include "_ops.h"

#define STALE 2

typedef enum {
    FETCH,   /* next register = op, from a register or from `seen` */
    TEST,    /* op, on a register or on `seen` */
    TENSOR,  /* tensor `seen` looks as it did */
    ANCHOR,  /* the register holds `seen` */
    CLASS_OF,/* type(seen) is `other` */
    DICT_OF, /* the dict of an instance is `seen`, with this version */
    VERSION, /* dict `seen` has this version */
} StepKind;

typedef struct {
    StepKind kind;
    Op *op;
    Py_ssize_t reg, other_reg;
    PyObject *seen, *other; /* borrowed; NULL: the value is in the register */
    PyObject **slot;        /* where the instance keeps its dict */
    uint64_t version;
    Metadata *metadata;
} Step;

typedef struct {
    Step *steps;
    Py_ssize_t count, n_registers;
    Step *outputs; /* one a register of the program: where its value is */
    Metadata *metadata;
    unsigned long long runs;
    unsigned int made;
    int off; /* it does not pay here */
} Memo;

/* What is known of a register of the program while a memo is made. */
typedef struct {
    PyObject *seen;
    Py_ssize_t reg; /* register of the memo, or -1 */
    int known;      /* the memo compares it, or reads it from what it compares */
    int versioned;  /* the memo compares its version */
    int classed;    /* the memo compares its class */
    int has_dict;   /* its instance dict is read */
} Fact;

typedef struct {
    Memo *memo;
    Fact *facts;
    Metadata *next;
    Py_ssize_t saved;
} Maker;

static void
forget_memo(Memo *memo)
{
    PyMem_Free(memo->steps);
    PyMem_Free(memo->outputs);
    PyMem_Free(memo->metadata);
    memo->steps = memo->outputs = NULL;
    memo->metadata = NULL;
    memo->count = 0;
}

/* ---- running */

static int
run_step(Step *step, PyObject *const *args, PyObject **registers, Py_ssize_t *filled,
         int64_t *amounts)
{
    PyObject *value = step->seen ? step->seen : step->reg >= 0 ? registers[step->reg] : NULL;
    PyObject *other = step->other       ? step->other
                      : step->other_reg >= 0 ? registers[step->other_reg] : NULL;
    switch (step->kind) {
    case FETCH: {
        if (step->op->code == OP_ITEM_OF && !hashes_by_address(other, step->op->object))
            return STALE; /* Python would run, which may change anything */
        PyObject *found = fetch(step->op, args, value, other);
        if (!found)
            return 0;
        registers[(*filled)++] = found;
        return 1;
    }
    case TEST:
        if (step->op->code == OP_CLASS) /* else Python would run */
            return same_version(PyTuple_GET_ITEM(step->op->object, 0), step->op->version) ? 1 : STALE;
        if (step->op->code == OP_NAMESPACE)
            return same_namespace(step->op->object, step->op->version) ? 1 : STALE;
        return test(step->op, value, other, amounts);
    case TENSOR: return test_tensor_again(step->op->tensor, value, step->metadata);
    case ANCHOR: return registers[step->reg] == step->seen ? 1 : STALE;
    case CLASS_OF: return (PyObject *)Py_TYPE(value) == step->other ? 1 : STALE;
    case DICT_OF:
        return *step->slot == value && version_of(value) == step->version ? 1 : STALE;
    default: return version_of(value) == step->version ? 1 : STALE; /* VERSION */
    }
}

#define ON_STACK 256

/* Run a memo: 1 when all guards hold, 0 when not, UNSURE, STALE when only the program can tell. Gives new
 * references to the registers that `wanted` numbers, where it is given. */
static int
run_memo(Memo *memo, PyObject *const *args, PyObject *wanted, PyObject **results)
{
    PyObject *registers[ON_STACK];
    int64_t amounts[MAX_AMOUNTS];
    Py_ssize_t filled = 0;
    int passed = memo->steps ? 1 : STALE;
    for (Step *step = memo->steps, *end = step + memo->count; passed == 1 && step < end; step++)
        passed = run_step(step, args, registers, &filled, amounts);
    if (passed == 1) {
        memo->runs++;
        for (Py_ssize_t i = 0; wanted && i < PyTuple_GET_SIZE(wanted); i++) {
            Step *from = &memo->outputs[PyLong_AsSsize_t(PyTuple_GET_ITEM(wanted, i))];
            results[i] = Py_NewRef(from->seen ? from->seen : registers[from->reg]);
        }
    }
    while (filled)
        Py_DECREF(registers[--filled]);
    return passed;
}

/* ---- making */

static Step *
add_step(Maker *maker, StepKind kind, Op *op, PyObject *seen)
{
    Step *step = &maker->memo->steps[maker->memo->count++];
    *step = (Step){.kind = kind, .op = op, .seen = seen, .reg = -1, .other_reg = -1};
    return step;
}

/* Take the value of a program's register as a step's operand. */
static void
operand(Fact *fact, PyObject **seen, Py_ssize_t *reg)
{
    *reg = fact->reg;
    *seen = fact->reg < 0 ? fact->seen : NULL;
}

/* Only plain dicts have a version that tells of each change; of an OrderedDict it says nothing about
 * the order. */
static int
has_version(PyObject *dict)
{
    return (PyDict_CheckExact(dict) || PyODict_CheckExact(dict)) && version_tells(dict);
}

/* Make sure that the memo compares the version of a known dict; 0 when it cannot. */
static int
compare_version(Maker *maker, Fact *fact)
{
    if (!fact->known || !has_version(fact->seen))
        return 0;
    if (!fact->versioned)
        add_step(maker, VERSION, NULL, fact->seen)->version = version_of(fact->seen);
    return fact->versioned = 1;
}

/* Make sure that the memo compares the class of a known object. */
static int
compare_class(Maker *maker, Fact *fact)
{
    if (!fact->classed)
        add_step(maker, CLASS_OF, NULL, fact->seen)->other = (PyObject *)Py_TYPE(fact->seen);
    return fact->classed = 1;
}

/* An instance's dict: known where the instance is. */
static int
know_dict(Maker *maker, Fact *base, Fact *fact)
{
    if (!base->known || PyType_Check(base->seen) || !has_version(fact->seen))
        return 0;
    PyObject **slot = _PyObject_GetDictPtr(base->seen);
    if (!slot || *slot != fact->seen)
        return 0;
    compare_class(maker, base);
    Step *step = add_step(maker, DICT_OF, NULL, fact->seen);
    step->slot = slot;
    step->version = version_of(fact->seen);
    return fact->versioned = 1;
}

/* Say whether what an instruction reads follows from what the memo compares. */
static int
follows(Maker *maker, Op *op, Fact *base, Fact *fact)
{
    switch (op->code) {
    case OP_CONST: return 1;
    case OP_DICT: return know_dict(maker, base, fact);
    case OP_ITEM: return compare_version(maker, base);
    case OP_INDEX: return base->known && PyTuple_CheckExact(base->seen);
    default: return 0;
    }
}

static void
add_fetch(Maker *maker, Op *op, Fact *base, Fact *other, Fact *fact)
{
    if (follows(maker, op, base, fact)) {
        fact->known = 1;
        maker->saved++;
        return;
    }
    Step *step = add_step(maker, FETCH, op, NULL);
    if (base)
        operand(base, &step->seen, &step->reg);
    if (other)
        operand(other, &step->other, &step->other_reg);
    fact->reg = maker->memo->n_registers++;
    if (fact->has_dict) { /* a root of what versions can tell */
        add_step(maker, ANCHOR, NULL, fact->seen)->reg = fact->reg;
        fact->known = 1;
    }
}

/* Say whether a test on a value that is read through compared versions holds as long as they do. */
static int
is_settled(Maker *maker, Op *op, Fact *fact, Fact *other)
{
    if (!fact || !fact->known || fact->reg >= 0)
        return 0;
    int fixed = !(Py_TYPE(fact->seen)->tp_flags & Py_TPFLAGS_HEAPTYPE) && !PyModule_Check(fact->seen);
    switch (op->code) {
    case OP_IS: case OP_IS_REF: case OP_EQUAL: return 1;
    case OP_IS_REG: case OP_IS_NOT: return other->known && other->reg < 0;
    case OP_TYPE: case OP_TYPE_REF: /* __class__ of instances can be assigned */
        return fixed || compare_class(maker, fact);
    case OP_LENGTH: case OP_NOT_IN: return compare_version(maker, fact);
    case OP_KEYS: return PyDict_CheckExact(fact->seen) && compare_version(maker, fact);
    default: return 0;
    }
}

static void
add_test(Maker *maker, Op *op, Fact *fact, Fact *other)
{
    if (is_settled(maker, op, fact, other)) {
        maker->saved++;
        return;
    }
    Step *step = add_step(maker, TEST, op, NULL);
    if (op->code == OP_TENSOR && fact->known && fact->reg < 0 &&
        keep_metadata(op->tensor, fact->seen, maker->next)) {
        step->kind = TENSOR;
        step->metadata = maker->next++;
    }
    if (fact)
        operand(fact, &step->seen, &step->reg);
    if (other)
        operand(other, &step->other, &step->other_reg);
}

static void
add_ops(Maker *maker, Op *ops, Py_ssize_t n_ops, PyObject **registers)
{
    Fact *facts = maker->facts, *next = facts;
    for (Op *op = ops; op < ops + n_ops; op++)
        if (op->code == OP_DICT)
            facts[op->a].has_dict = 1;
    for (Op *op = ops; op < ops + n_ops; op++) {
        Fact *base = READS_REGISTER(op) ? &facts[op->a] : NULL, *other = OTHER(op, facts);
        if (IS_FETCH(op)) {
            next->seen = registers[next - facts];
            next->reg = -1;
            add_fetch(maker, op, base, other, next);
            next++;
        }
        else
            add_test(maker, op, base, other);
    }
}

/* Not at the first run, which may stay the only one, and not where memos keep going stale. */
static int
worth_making(Memo *memo)
{
    memo->runs++;
    return !memo->off && (memo->made ? memo->runs >= 8ull * memo->made : memo->runs >= 2);
}

static int
allocate(Maker *maker, Op *ops, Py_ssize_t n_ops, Py_ssize_t n_registers)
{
    Memo *memo = maker->memo;
    Py_ssize_t tensors = 1;
    for (Py_ssize_t i = 0; i < n_ops; i++)
        tensors += ops[i].code == OP_TENSOR;
    maker->facts = PyMem_Calloc(n_registers + 1, sizeof(Fact));
    memo->steps = PyMem_Malloc((3 * n_ops + 1) * sizeof(Step));
    memo->outputs = PyMem_Malloc((n_registers + 1) * sizeof(Step));
    maker->next = memo->metadata = PyMem_Malloc(tensors * sizeof(Metadata));
    return maker->facts && memo->steps && memo->outputs && memo->metadata;
}

/* Make a memo of a run that passed, with the registers it filled. */
static void
remember(Memo *memo, Op *ops, Py_ssize_t n_ops, Py_ssize_t n_registers, PyObject **registers)
{
    Maker maker = {.memo = memo};
    if (!worth_making(memo))
        return;
    forget_memo(memo);
    memo->made++;
    memo->n_registers = 0;
    if (allocate(&maker, ops, n_ops, n_registers)) {
        add_ops(&maker, ops, n_ops, registers);
        for (Py_ssize_t i = 0; i < n_registers; i++)
            operand(&maker.facts[i], &memo->outputs[i].seen, &memo->outputs[i].reg);
        memo->off = memo->n_registers > ON_STACK || maker.saved < 4;
        if (memo->off)
            forget_memo(memo);
    }
    else
        forget_memo(memo);
    PyMem_Free(maker.facts);
}

#endif
