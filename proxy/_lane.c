/* The short way of a streamed chunk, compiled: `proxy/lane.py` says what it does and why, this does it in a fifth of the
 * time. Built where a compiler is at hand; `PythonLane` there is the same in Python, and tests/proxy/test_lane.py holds
 * the two to the same behaviour. No state of its own beyond the fields of one connection; no reference outlives a call.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <string.h>

enum { LONGEST = 4096, MARKS = 256 };
enum { ANY, TEXT, ASCII }; /* proxy.wire.streams.Inside */

typedef struct {
    PyObject_HEAD
    char is_open;
    long inside;
    Py_ssize_t sent;
    PyObject *shape;                        /* the Shape that the following were read from, NULL: none */
    PyObject *head, *tail;                  /* bytes */
    PyObject *new_head, *new_tail;          /* bytes; NULL: as they came */
    PyObject *parts, *marks;                /* lists; parts may be NULL */
    PyObject *between, *ids, *texts;        /* bytes and lists of Shape.kept, all NULL: nothing is kept */
    PyObject *write, *now, *fold;           /* callables */
} Lane;

static PyObject *name_received, *name_head, *name_tail, *name_renamed, *name_inside, *name_parts, *name_kept;

static int
lane_traverse(Lane *self, visitproc visit, void *arg)
{
    Py_VISIT(self->shape);
    Py_VISIT(self->parts);
    Py_VISIT(self->ids);
    Py_VISIT(self->texts);
    Py_VISIT(self->marks);
    Py_VISIT(self->write);
    Py_VISIT(self->now);
    Py_VISIT(self->fold);
    return 0;
}

static int
lane_clear(Lane *self)
{
    self->is_open = 0;
    Py_CLEAR(self->shape);
    Py_CLEAR(self->head);
    Py_CLEAR(self->tail);
    Py_CLEAR(self->new_head);
    Py_CLEAR(self->new_tail);
    Py_CLEAR(self->parts);
    Py_CLEAR(self->between);
    Py_CLEAR(self->ids);
    Py_CLEAR(self->texts);
    Py_CLEAR(self->marks);
    Py_CLEAR(self->write);
    Py_CLEAR(self->now);
    Py_CLEAR(self->fold);
    return 0;
}

static void
lane_dealloc(Lane *self)
{
    PyObject_GC_UnTrack(self);
    lane_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* A bytes member of the shape, as a new reference. */
static PyObject *
bytes_of(PyObject *value)
{
    if (value != NULL && !PyBytes_CheckExact(value)) {
        PyErr_SetString(PyExc_TypeError, "a shape's head and tail are bytes");
        Py_CLEAR(value);
    }
    return value;
}

/* Shape.kept, which is None or three things. */
static int
read_kept(Lane *self, PyObject *shape)
{
    PyObject *kept = PyObject_GetAttr(shape, name_kept);
    if (kept == NULL)
        return -1;
    int failed = 0;
    if (kept != Py_None) {
        self->between = bytes_of(PySequence_GetItem(kept, 0));
        self->ids = self->between ? PySequence_GetItem(kept, 1) : NULL;
        self->texts = self->ids ? PySequence_GetItem(kept, 2) : NULL;
        failed = self->texts == NULL;
        if (!failed && !(PyList_Check(self->ids) && PyList_Check(self->texts))) {
            PyErr_SetString(PyExc_TypeError, "ids and texts are kept in lists");
            failed = 1;
        }
    }
    Py_DECREF(kept);
    return failed ? -1 : 0;
}

static int
read_shape(Lane *self, PyObject *shape)
{
    self->head = bytes_of(PyObject_GetAttr(shape, name_head));
    self->tail = self->head ? bytes_of(PyObject_GetAttr(shape, name_tail)) : NULL;
    PyObject *inside = self->tail ? PyObject_GetAttr(shape, name_inside) : NULL;
    if (inside == NULL)
        return -1;
    self->inside = PyLong_AsLong(inside);
    Py_DECREF(inside);
    if (PyErr_Occurred())
        return -1;
    PyObject *renamed = PyObject_GetAttr(shape, name_renamed);
    if (renamed == NULL)
        return -1;
    if (renamed != Py_None) {
        self->new_head = bytes_of(PySequence_GetItem(renamed, 0));
        self->new_tail = self->new_head ? bytes_of(PySequence_GetItem(renamed, 1)) : NULL;
    }
    int failed = renamed != Py_None && self->new_tail == NULL;
    Py_DECREF(renamed);
    PyObject *parts = failed ? NULL : PyObject_GetAttr(shape, name_parts);
    if (parts == NULL)
        return -1;
    if (PyList_Check(parts))
        self->parts = Py_NewRef(parts);
    Py_DECREF(parts);
    return read_kept(self, shape);
}

static PyObject *
lane_open(Lane *self, PyObject *args)
{
    PyObject *shape, *write, *now, *marks, *fold;
    if (!PyArg_ParseTuple(args, "OOOO!O:open", &shape, &write, &now, &PyList_Type, &marks, &fold))
        return NULL;
    if (shape != self->shape) {
        lane_clear(self);
        if (read_shape(self, shape) < 0) {
            lane_clear(self);
            return NULL;
        }
        self->shape = Py_NewRef(shape);
        self->write = Py_NewRef(write);
        self->now = Py_NewRef(now);
        self->marks = Py_NewRef(marks);
        self->fold = Py_NewRef(fold);
    }
    self->is_open = 1;
    Py_RETURN_NONE;
}

static PyObject *
lane_close(Lane *self, PyObject *Py_UNUSED(ignored))
{
    self->is_open = 0;
    Py_RETURN_NONE;
}

static PyObject *
lane_forget(Lane *self, PyObject *Py_UNUSED(ignored))
{
    lane_clear(self);
    self->sent = 0;
    Py_RETURN_NONE;
}

/* The length of the size line that `data` begins with, if that is the whole chunk's and spelled as everybody does; else 0. */
static Py_ssize_t
size_line(const char *data, Py_ssize_t length)
{
    for (Py_ssize_t digits = 1; digits <= 3; digits++) {
        Py_ssize_t size = length - digits - 4;
        if (size < 1)
            return 0;
        if (size >> (4 * digits) != 0)
            continue;
        for (Py_ssize_t at = 0; at < digits; at++)
            if (data[at] != "0123456789abcdef"[(size >> (4 * (digits - 1 - at))) & 15])
                return 0;
        int whole = data[0] != '0' && data[digits] == '\r' && data[digits + 1] == '\n' && data[length - 2] == '\r'
                    && data[length - 1] == '\n';
        return whole ? digits + 2 : 0;
    }
    return 0;
}

/* Whether what stands there is the inside of a JSON string that may pass unseen. */
static int
passes(long inside, const char *at, const char *end)
{
    for (; at < end; at++) {
        unsigned char byte = (unsigned char)*at;
        if (byte == '"' || byte == '\n')
            return 0;
        if (inside == ASCII) {
            if (byte < ' ' || byte > '~' || byte == '\\')
                return 0;
        }
        else if (byte == '\\') {
            if (++at >= end || *at == '\n')
                return 0;
            if (inside == TEXT && (*at == '\0' || strchr("\"\\/bfrt", *at) == NULL))
                return 0;
        }
        else if (inside == TEXT && (byte == '<' || byte == '`' || byte == '~'))
            return 0;
    }
    return 1;
}

/* The chunk as the client is to see it, head and tail renamed. */
static PyObject *
renamed_chunk(Lane *self, const char *text, Py_ssize_t length)
{
    Py_ssize_t head = PyBytes_GET_SIZE(self->new_head), tail = PyBytes_GET_SIZE(self->new_tail);
    char line[20];
    int start = snprintf(line, sizeof line, "%zx\r\n", (size_t)(head + length + tail));
    PyObject *chunk = PyBytes_FromStringAndSize(NULL, start + head + length + tail + 2);
    if (chunk == NULL)
        return NULL;
    char *out = PyBytes_AS_STRING(chunk);
    memcpy(out, line, start);
    memcpy(out += start, PyBytes_AS_STRING(self->new_head), head);
    memcpy(out += head, text, length);
    memcpy(out += length, PyBytes_AS_STRING(self->new_tail), tail);
    memcpy(out + tail, "\r\n", 2);
    self->sent += head + length + tail;
    return chunk;
}

static int
note(Lane *self, const char *text, Py_ssize_t length)
{
    if (self->parts == NULL)
        return 0;
    PyObject *part = PyUnicode_DecodeASCII(text, length, NULL);
    int failed = part == NULL || PyList_Append(self->parts, part) < 0;
    Py_XDECREF(part);
    return failed ? -1 : 0;
}

/* Where the ids that end at `end` begin; `end` if what stands there is none. */
static const char *
ids_before(const char *begin, const char *end)
{
    const char *at = end;
    int digits = 0;
    for (; at > begin; at--) {
        if (at[-1] >= '0' && at[-1] <= '9') {
            if (++digits > 18)
                return end;
        }
        else if (at[-1] == ',' && digits > 0)
            digits = 0;
        else
            break;
    }
    return digits > 0 ? at : end;
}

static int
append_bytes(PyObject *list, const char *at, Py_ssize_t length)
{
    PyObject *piece = PyBytes_FromStringAndSize(at, length);
    int failed = piece == NULL || PyList_Append(list, piece) < 0;
    Py_XDECREF(piece);
    return failed ? -1 : 0;
}

/* Marks the time of a delta; folds the marks when there are many. */
static int
mark(Lane *self)
{
    PyObject *marks = Py_NewRef(self->marks), *fold = Py_NewRef(self->fold), *done = NULL;
    PyObject *now = PyObject_CallNoArgs(self->now);
    int failed = now == NULL || PyList_Append(marks, now) < 0;
    if (!failed && PyList_GET_SIZE(marks) >= MARKS) {
        done = PyObject_CallNoArgs(fold);
        failed = done == NULL;
    }
    Py_XDECREF(done);
    Py_XDECREF(now);
    Py_DECREF(marks);
    Py_DECREF(fold);
    return failed ? -1 : 0;
}

/* 1: the chunk took the short way. 0: it did not, and nothing was done. -1: an exception. */
static int
take(Lane *self, PyObject *chunk)
{
    const char *data = PyBytes_AS_STRING(chunk);
    Py_ssize_t length = PyBytes_GET_SIZE(chunk);
    Py_ssize_t head = PyBytes_GET_SIZE(self->head), tail = PyBytes_GET_SIZE(self->tail);
    Py_ssize_t start = length <= LONGEST ? size_line(data, length) : 0;
    Py_ssize_t inside = length - start - head - tail - 2;
    if (start == 0 || inside < 1 || memcmp(data + start, PyBytes_AS_STRING(self->head), head) != 0)
        return 0;
    const char *text = data + start + head, *end = text + inside, *ids = end;
    if (memcmp(end, PyBytes_AS_STRING(self->tail), tail) != 0)
        return 0;
    if (self->texts != NULL && PyBytes_GET_SIZE(self->between) > 0) {
        Py_ssize_t between = PyBytes_GET_SIZE(self->between);
        ids = ids_before(text, end);
        inside = ids - text - between;
        if (ids == end || inside < 1 || memcmp(text + inside, PyBytes_AS_STRING(self->between), between) != 0)
            return 0;
    }
    if (!passes(self->inside, text, text + inside))
        return 0;
    if (self->texts != NULL) {
        if (append_bytes(self->texts, text, inside) < 0)
            return -1;
        if (ids < end && append_bytes(self->ids, ids, end - ids) < 0)
            return -1;
    }
    if (note(self, text, inside) < 0)
        return -1;
    PyObject *out;
    if (self->new_head == NULL) {
        out = Py_NewRef(chunk);
        self->sent += length - start - 2;
    }
    else if ((out = renamed_chunk(self, text, inside)) == NULL)
        return -1;
    PyObject *write = Py_NewRef(self->write);
    PyObject *done = PyObject_CallOneArg(write, out);
    Py_DECREF(write);
    Py_DECREF(out);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    /* Writing may have told the client's side that it is full, or lost; the lane may be another's by now. */
    return self->marks == NULL || mark(self) == 0 ? 1 : -1;
}

static PyObject *
lane_data_received(Lane *self, PyObject *data)
{
    if (self->is_open && PyBytes_CheckExact(data)) {
        int taken = take(self, data);
        if (taken < 0)
            return NULL;
        if (taken)
            Py_RETURN_NONE;
    }
    self->is_open = 0;
    return PyObject_CallMethodOneArg((PyObject *)self, name_received, data);
}

static PyMethodDef lane_methods[] = {
    {"open", (PyCFunction)lane_open, METH_VARARGS, "open(shape, write, now, marks, fold)"},
    {"close", (PyCFunction)lane_close, METH_NOARGS, "Until it is opened again everything goes the long way."},
    {"forget", (PyCFunction)lane_forget, METH_NOARGS, "The exchange is over: nothing of it is held."},
    {"data_received", (PyCFunction)lane_data_received, METH_O, "A read: by the lane, or `received`."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef lane_members[] = {
    {"sent", T_PYSSIZET, offsetof(Lane, sent), READONLY, "Bytes of this exchange's body that took the short way."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject LaneType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "proxy._lane.Lane",
    .tp_doc = "proxy.lane.PythonLane, compiled.",
    .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_methods = lane_methods,
    .tp_members = lane_members,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "proxy._lane", .m_doc = "The compiled lane.", .m_size = -1,
};

PyMODINIT_FUNC
PyInit__lane(void)
{
    struct { PyObject **name; const char *text; } names[] = {
        {&name_received, "received"}, {&name_head, "head"}, {&name_tail, "tail"},
        {&name_renamed, "renamed"}, {&name_inside, "inside"}, {&name_parts, "parts"},
        {&name_kept, "kept"},
    };
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        if ((*names[at].name = PyUnicode_InternFromString(names[at].text)) == NULL)
            return NULL;
    if (PyType_Ready(&LaneType) < 0)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (self != NULL && PyModule_AddObjectRef(self, "Lane", (PyObject *)&LaneType) < 0)
        Py_CLEAR(self);
    return self;
}
