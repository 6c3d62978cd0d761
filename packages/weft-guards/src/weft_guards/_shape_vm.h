/* Conditions on sizes, strides and ints: SIZE, STRIDE and INT read amounts, SHAPE tests them.
 *
 * A condition is postfix code over int64: words that push an amount or a number, and words that
 * replace what lies on top of a stack. shapecode.py writes it from the Python text of the condition.
 * Division rounds as Python's does. What int64 cannot hold, and division by zero, is UNSURE: the
 * whole check then runs in its Python form.
 */
#ifndef WEFT_GUARDS_SHAPE_VM_H
#define WEFT_GUARDS_SHAPE_VM_H

#include "_tensor.h"

#define UNSURE 3
#define MAX_AMOUNTS 128
#define MAX_WORDS 256

#define WORDS(X)                                                                                 \
    X(AMOUNT) /* push the amount that the next word numbers */                                   \
    X(NUMBER) /* push the next word */                                                           \
    X(ADD) X(MUL) X(DIV) X(MOD) X(MIN) X(MAX) X(EQ) X(LT) X(LE) /* replace two by one */         \
    X(FLOOR) /* the same; floor(a / b) through floats, exact where both are below 2**53 */

#define WORD_AS_ENUM(name) DO_##name,
#define WORD_AS_TEXT(name) #name " "
enum { WORDS(WORD_AS_ENUM) N_WORDS };
#define WORD_NAMES WORDS(WORD_AS_TEXT)

/* Put an amount of a tensor or an int into its place: 1, or UNSURE. */
static int
read_extent(get_ptr read, PyObject *value, Py_ssize_t dim, int64_t *amount)
{
    int64_t *now;
    if (read((char *)value + torch_abi.handle_offset, &now))
        return UNSURE;
    *amount = now[dim];
    return 1;
}

static int
read_int(PyObject *value, int64_t *amount)
{
    int overflow = !PyLong_CheckExact(value);
    if (!overflow)
        *amount = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow ? UNSURE : 1;
}

/* ---- arithmetic: each puts a result and returns 1, or returns 0 where int64 does not hold it */

static int
divide(int64_t a, int64_t b, int64_t *quotient, int64_t *rest)
{
    if (b == 0 || (b == -1 && a == INT64_MIN))
        return 0;
    *quotient = a / b;
    *rest = a % b;
    if (*rest && (*rest < 0) != (b < 0)) {
        *quotient -= 1;
        *rest += b;
    }
    return 1;
}

#define IS_SMALL(a) ((a) >> 53 == 0 || (a) >> 53 == -1)

static int
combine(int64_t word, int64_t a, int64_t b, int64_t *result)
{
    int64_t other;
    switch (word) {
    case DO_ADD: return !__builtin_add_overflow(a, b, result);
    case DO_MUL: return !__builtin_mul_overflow(a, b, result);
    case DO_DIV: return divide(a, b, result, &other);
    case DO_MOD: return divide(a, b, &other, result);
    case DO_FLOOR: return IS_SMALL(a) && IS_SMALL(b) && divide(a, b, result, &other);
    case DO_MIN: *result = a < b ? a : b; return 1;
    case DO_MAX: *result = a > b ? a : b; return 1;
    case DO_EQ: *result = a == b; return 1;
    case DO_LT: *result = a < b; return 1;
    default: *result = a <= b; return 1; /* DO_LE */
    }
}

/* Whether a condition is well formed: words that exist, amounts that are read, one result. */
static int
is_condition(PyObject *code, Py_ssize_t amounts)
{
    Py_ssize_t depth = 0, size = PyBytes_Check(code) ? PyBytes_GET_SIZE(code) : -1;
    if (size < 0 || size % sizeof(int64_t) || size / sizeof(int64_t) > MAX_WORDS)
        return 0;
    const int64_t *word = (const int64_t *)PyBytes_AS_STRING(code), *end = word + size / sizeof *word;
    for (; word < end; word++) {
        int64_t what = *word, pushes = what <= DO_NUMBER;
        if (what < 0 || what >= N_WORDS || (pushes && ++word == end) || (!pushes && depth < 2) ||
            (what == DO_AMOUNT && (*word < 0 || *word >= amounts)))
            return 0;
        depth += pushes ? 1 : -1;
    }
    return depth == 1;
}

/* 1 when a condition holds, 0 when not, or UNSURE. */
static int
test_shape(PyObject *condition, const int64_t *amounts)
{
    int64_t stack[MAX_WORDS / 2 + 1], *top = stack; /* below the first value */
    const int64_t *word = (const int64_t *)PyBytes_AS_STRING(condition);
    const int64_t *end = word + PyBytes_GET_SIZE(condition) / sizeof *word;
    for (; word < end; word++) {
        if (*word == DO_AMOUNT)
            *++top = amounts[*++word];
        else if (*word == DO_NUMBER)
            *++top = *++word;
        else if (top--, !combine(*word, top[0], top[1], top))
            return UNSURE;
    }
    return *top != 0;
}

#endif
