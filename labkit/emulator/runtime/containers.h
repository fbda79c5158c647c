// A vector and a text, so that the runtime needs no C++ library: a kernel then links in milliseconds with any
// linker.
#pragma once
#include "platform.h"

namespace emu {

struct Place {};  // tag of our own placement new; <new> is C++ library
}  // namespace emu
inline void* operator new(size_t, void* place, emu::Place) noexcept { return place; }

namespace emu {

template <class T> T smaller(T a, T b) { return b < a ? b : a; }
template <class T> T larger(T a, T b) { return a < b ? b : a; }

[[noreturn]] static void out_of_memory()
{
    fputs("emulator: out of memory\n", stderr);
    abort();
}

template <class T> class vector {
    T* items = nullptr;
    size_t count = 0, capacity = 0;

public:
    vector() {}
    vector(const vector& other) { *this = other; }
    ~vector()
    {
        clear();
        free((void*)items);
    }
    vector& operator=(const vector& other)
    {
        if (this == &other) return *this;
        clear();
        reserve(other.count);
        for (const T& item : other) push_back(item);
        return *this;
    }

    void reserve(size_t wanted)
    {
        if (wanted <= capacity) return;
        T* moved = (T*)malloc(wanted * sizeof(T));
        if (!moved) out_of_memory();
        for (size_t i = 0; i < count; i++) {
            new (moved + i, Place()) T(items[i]);
            items[i].~T();
        }
        free((void*)items);
        items = moved;
        capacity = wanted;
    }
    void push_back(const T& item)
    {
        if (count == capacity) {
            const T copy(item);  // the item may lie in the block that is about to move
            reserve(capacity ? 2 * capacity : 8);
            new (items + count, Place()) T(copy);
        } else {
            new (items + count, Place()) T(item);
        }
        count++;
    }
    void resize(size_t wanted)
    {
        reserve(wanted);
        while (count < wanted) new (items + count++, Place()) T();
        while (count > wanted) pop_back();
    }
    void erase_front(size_t n)
    {
        for (size_t i = 0; i + n < count; i++) items[i] = items[i + n];
        while (n--) pop_back();
    }
    void pop_back() { items[--count].~T(); }
    void clear()
    {
        while (count) pop_back();
    }
    void release()
    {
        clear();
        free((void*)items);
        items = nullptr;
        capacity = 0;
    }

    size_t size() const { return count; }
    bool empty() const { return count == 0; }
    T* data() { return items; }
    T& operator[](size_t i) { return items[i]; }
    const T& operator[](size_t i) const { return items[i]; }
    T& back() { return items[count - 1]; }
    T& front() { return items[0]; }
    T* begin() { return items; }
    T* end() { return items + count; }
    const T* begin() const { return items; }
    const T* end() const { return items + count; }
};

// A growing text.
class text {
    vector<char> letters;

public:
    text() { letters.push_back(0); }
    text(const char* start) : text() { *this += start; }
    text& operator+=(const char* more)
    {
        letters.pop_back();
        for (; *more; more++) letters.push_back(*more);
        letters.push_back(0);
        return *this;
    }
    text& operator+=(const text& more) { return *this += more.c_str(); }
    __attribute__((format(printf, 2, 3))) text& addf(const char* format, ...)
    {
        char line[512];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(line, sizeof line, format, arguments);
        va_end(arguments);
        return *this += line;
    }
    // As the inside of a JSON string.
    text& add_escaped(const char* plain)
    {
        for (const unsigned char* c = (const unsigned char*)plain; *c; c++) {
            if (*c == '"' || *c == '\\') addf("\\%c", *c);
            else if (*c < 0x20) addf("\\u%04x", *c);
            else addf("%c", *c);
        }
        return *this;
    }
    void clear()
    {
        letters.clear();
        letters.push_back(0);
    }
    const char* c_str() const { return letters.begin(); }
    size_t size() const { return letters.size() - 1; }
};

// Insertion sort: the lists are short and nearly sorted.
template <class T, class Less> void sort(vector<T>& items, Less less)
{
    for (size_t i = 1; i < items.size(); i++)
        for (size_t j = i; j > 0 && less(items[j], items[j - 1]); j--) {
            T t(items[j]);
            items[j] = items[j - 1];
            items[j - 1] = t;
        }
}
}  // namespace emu
