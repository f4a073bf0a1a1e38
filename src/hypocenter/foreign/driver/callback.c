/* The callback that CUPTI calls around functions of the driver: writes what it sees into a table.
 *
 * It runs in any thread, with or without Python's lock, and takes no lock that Python takes. Python
 * is asked for the line of the program only where the thread is one of Python's: such a thread takes
 * that lock again anyway when its call comes back. `driver_table.py` says how the table lies.
 */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "table.h"

typedef int (*tell_parameter)(void *function, size_t number, size_t *offset, size_t *size);

static char *table;
static struct head *head;
static tell_parameter tell_of_function, tell_of_kernel;
static void *(*python_thread)(void);
static uint32_t (*ask_site)(void);
static void (*tell_refusal)(uint64_t at, uint64_t function, int code);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile int is_over;

/* Kernels that were met, by the driver's handle and the address of the name; 0 is free. */
static struct { uint64_t function, symbol; uint32_t number; } met[NUM_MET];

void hypo_begin(char *mapped, void *of_function, void *of_kernel, void *thread, void *site,
                void *refusal)
{
    pthread_mutex_lock(&lock);
    table = mapped;
    head = (struct head *)mapped;
    tell_of_function = (tell_parameter)of_function;
    tell_of_kernel = (tell_parameter)of_kernel;
    python_thread = (void *(*)(void))thread;
    ask_site = (uint32_t (*)(void))site;
    tell_refusal = (void (*)(uint64_t, uint64_t, int))refusal;
    memset(met, 0, sizeof met);
    is_over = 0;
    pthread_mutex_unlock(&lock);
}

void hypo_end(void) { is_over = 1; }

static struct kernel *kernel_at(uint32_t number)
{
    return (struct kernel *)(table + KERNELS_AT) + number;
}

static struct launch *launch_at(uint64_t slot)
{
    return (struct launch *)(table + LAUNCHES_AT) + slot;
}

static uint32_t site_of_now(void) { return python_thread() ? ask_site() : 0; }

/* What a kernel takes, as far as the driver tells. */
static void ask_parameters(struct kernel *kernel, uint64_t function)
{
    tell_parameter tell = tell_of_function;
    for (int way = 0; way < 2 && !kernel->num_parameters; way++, tell = tell_of_kernel) {
        size_t offset, size;
        while (tell && kernel->num_parameters < NUM_PARAMETERS &&
               tell((void *)function, kernel->num_parameters, &offset, &size) == 0) {
            if (offset > 0xFFFF || size > 0xFFFF)
                break;
            kernel->parameters[kernel->num_parameters].offset = offset;
            kernel->parameters[kernel->num_parameters].num_bytes = size;
            kernel->num_parameters++;
        }
    }
}

/* A kernel that is new to the table; its number, or 0 where there is no room. */
static uint32_t add_kernel(uint64_t function, const char *symbol)
{
    uint32_t number = head->num_kernels + 1;
    if (number >= NUM_KERNELS)
        return 0;
    struct kernel *kernel = kernel_at(number);
    memset(kernel, 0, sizeof *kernel);
    if (symbol)
        strncpy(kernel->symbol, symbol, sizeof kernel->symbol - 1);
    ask_parameters(kernel, function);
    head->num_kernels = number;
    return number;
}

static uint32_t kernel_of(uint64_t function, const char *symbol)
{
    uint64_t mixed = (function ^ ((uint64_t)symbol << 1)) * 0x9E3779B97F4A7C15ull;
    uint32_t number = 0;
    pthread_mutex_lock(&lock);
    for (int turn = 0; turn < 16; turn++) {
        uint32_t at = ((mixed >> 40) + turn) % NUM_MET;
        if (met[at].number && met[at].function == function && met[at].symbol == (uint64_t)symbol) {
            number = met[at].number;
            break;
        }
        if (!met[at].number || turn == 15) {
            number = add_kernel(function, symbol);
            met[at].function = function;
            met[at].symbol = (uint64_t)symbol;
            met[at].number = number;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return number;
}

/* Parameters of a launch into `data`; how many bytes. They come one by one, or in one buffer. */
static uint32_t copy_parameters(const struct kernel *kernel, void **given, void **extra, char *data)
{
    uint32_t end = 0;
    if (given) {
        for (uint32_t i = 0; kernel && i < kernel->num_parameters; i++) {
            uint32_t offset = kernel->parameters[i].offset, size = kernel->parameters[i].num_bytes;
            if (offset + size > DATA_BYTES || !given[i])
                break;
            memcpy(data + offset, given[i], size);
            end = offset + size;
        }
        return end;
    }
    void *buffer = 0;
    size_t size = 0;
    for (int i = 0; extra && extra[i] && i < 8; i += 2) {
        if (extra[i] == (void *)1)
            buffer = extra[i + 1];
        if (extra[i] == (void *)2)
            size = *(size_t *)extra[i + 1];
    }
    if (!buffer)
        return 0;
    end = size < DATA_BYTES ? size : DATA_BYTES;
    memcpy(data, buffer, end);
    return end;
}

/* A launch begins: its slot, with all but the answer and the parameters, which come at its end. What
 * a kernel takes is asked for now: a GPU that has failed in the launch answers nothing any more. */
static uint64_t note_launch(const char *symbol, uint64_t function, const uint32_t *sizes,
                            void *stream)
{
    uint32_t number = kernel_of(function, symbol);
    uint64_t seq = __atomic_add_fetch(&head->num_events, 1, __ATOMIC_RELAXED);
    uint64_t slot = __atomic_add_fetch(&head->num_launches, 1, __ATOMIC_RELAXED) % NUM_LAUNCHES;
    struct launch *launch = launch_at(slot);
    launch->seq = 0; /* until it is whole */
    launch->kernel = number;
    launch->code = NO_ANSWER;
    memcpy(launch->sizes, sizes, sizeof launch->sizes);
    launch->stream = (uint64_t)stream;
    launch->num_bytes = 0;
    launch->site = site_of_now();
    __atomic_store_n(&launch->seq, seq, __ATOMIC_RELEASE);
    return seq * NUM_LAUNCHES + slot;
}

static void note_answer(uint64_t begun, void **given, void **extra, uint64_t function, int code)
{
    struct launch *launch = launch_at(begun % NUM_LAUNCHES);
    if (launch->seq != begun / NUM_LAUNCHES)
        return; /* others have taken its slot */
    struct kernel *kernel = launch->kernel ? kernel_at(launch->kernel) : 0;
    if (!code && kernel && !kernel->num_parameters) {
        pthread_mutex_lock(&lock); /* one that was loaded by its first launch */
        ask_parameters(kernel, function);
        pthread_mutex_unlock(&lock);
    }
    /* Of a launch that was refused nobody has looked at what its pointers lead to. From 700 on, but
       for 701, an answer is of what ran, and the launch was made. */
    if (!code || (code >= 700 && code != 701))
        launch->num_bytes = copy_parameters(kernel, given, extra, launch->data);
    __atomic_store_n(&launch->code, code, __ATOMIC_RELEASE);
    if (code && python_thread())
        tell_refusal((char *)launch - table, function, code);
}

static struct memory *memory_at(uint32_t number)
{
    return (struct memory *)(table + MEMORY_AT) + number;
}

/* A place for new memory: one that was never used, else the one that was freed longest ago. */
static struct memory *place_for_memory(void)
{
    struct memory *oldest = 0;
    if (head->num_memory < NUM_MEMORY)
        return memory_at(head->num_memory++);
    for (uint32_t i = 0; i < NUM_MEMORY; i++) {
        struct memory *memory = memory_at(i);
        if (memory->freed_seq && (!oldest || memory->freed_seq < oldest->freed_seq))
            oldest = memory;
    }
    return oldest;
}

static void note_made(uint64_t address, uint64_t num_bytes, uint32_t call)
{
    uint32_t site = site_of_now();
    pthread_mutex_lock(&lock);
    struct memory *memory = place_for_memory();
    if (memory) {
        memset(memory, 0, sizeof *memory);
        memory->address = address;
        memory->num_bytes = num_bytes;
        memory->call = call;
        memory->site = site;
        memory->seq = __atomic_add_fetch(&head->num_events, 1, __ATOMIC_RELAXED);
    } else {
        head->num_memory_lost++;
    }
    pthread_mutex_unlock(&lock);
}

/* Memory that begins in these bytes is there no more: that of one address, or all of a range. */
static void note_freed(uint64_t address, uint64_t num_bytes)
{
    uint32_t site = site_of_now();
    pthread_mutex_lock(&lock);
    for (uint32_t i = head->num_memory; i-- > 0;) {
        struct memory *memory = memory_at(i);
        if (memory->freed_seq || memory->address - address >= num_bytes)
            continue;
        memory->freed_site = site;
        memory->freed_seq = __atomic_add_fetch(&head->num_events, 1, __ATOMIC_RELAXED);
        if (num_bytes == 1)
            break;
    }
    pthread_mutex_unlock(&lock);
}

static void note_memory(uint32_t call, const uint64_t *given)
{
    switch (call) {
    case CALL_ALLOC:
    case CALL_MANAGED:
    case CALL_ASYNC:
    case CALL_ASYNC_PTSZ:
    case CALL_POOL:
    case CALL_POOL_PTSZ:
        note_made(*(uint64_t *)given[0], given[1], call);
        break;
    case CALL_PITCH:
        note_made(*(uint64_t *)given[0], *(uint64_t *)given[1] * given[3], call);
        break;
    case CALL_MAP:
        note_made(given[0], given[1], call);
        break;
    case CALL_UNMAP:
        note_freed(given[0], given[1]);
        break;
    default:
        if (given[0])
            note_freed(given[0], 1);
    }
}

/* Arguments of the functions that launch: `generated_cuda_meta.h`. */
struct launch_arguments { uint64_t function; uint32_t sizes[7]; void *stream, **given, **extra; };
struct launch_config { uint32_t sizes[7]; void *stream; };
struct extended_arguments { struct launch_config *config; uint64_t function; void **given, **extra; };
/* `CUpti_CallbackData` of `cupti_callbacks.h`; `begun` is kept from a call's beginning to its end. */
struct callback_data { int site; const char *name; const void *given; const int *result;
                       const char *symbol; void *context; uint32_t context_id; uint64_t *begun; };

/* A launch is asked for, or has been answered. */
static void launch(const struct callback_data *data, uint64_t function, const uint32_t *sizes,
                   void *stream, void **given, void **extra)
{
    int is_end = data->site == 1;
    uint64_t begun = is_end && data->begun ? *data->begun : 0;
    if (!begun)
        begun = note_launch(data->symbol, function, sizes, stream);
    if (is_end)
        note_answer(begun, given, extra, function, *data->result);
    else if (data->begun)
        *data->begun = begun;
}

void hypo_callback(void *user, int domain, uint32_t call, const struct callback_data *data)
{
    (void)user;
    if (is_over || domain != 1 || !table)
        return;
    if (call == CALL_LAUNCH || call == CALL_LAUNCH_PTSZ || call == CALL_COOPERATIVE ||
        call == CALL_COOPERATIVE_PTSZ) {
        const struct launch_arguments *asked = data->given;
        int is_plain = call == CALL_LAUNCH || call == CALL_LAUNCH_PTSZ;
        launch(data, asked->function, asked->sizes, asked->stream, asked->given,
               is_plain ? asked->extra : 0);
    } else if (call == CALL_EXTENDED || call == CALL_EXTENDED_PTSZ) {
        const struct extended_arguments *asked = data->given;
        if (asked->config)
            launch(data, asked->function, asked->config->sizes, asked->config->stream,
                   asked->given, asked->extra);
    } else if (data->site != 1 || *data->result) {
        return; /* of others at the end alone: the answer is known then */
    } else if (call == CALL_GRAPH || call == CALL_GRAPH_PTSZ) {
        __atomic_add_fetch(&head->num_graphs, 1, __ATOMIC_RELAXED);
    } else if (call == CALL_MODULE_UNLOAD || call == CALL_LIBRARY_UNLOAD) {
        pthread_mutex_lock(&lock); /* handles may stand for other kernels from now on */
        memset(met, 0, sizeof met);
        pthread_mutex_unlock(&lock);
    } else {
        note_memory(call, data->given);
    }
}
